"""The parts of a report's page: its markup, its styles and its program."""
