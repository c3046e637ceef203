"""One worker's work on one config: compile, load, check, measure."""
