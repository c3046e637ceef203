"""The routes of trials through processes, one per file; `choosing` decides which a sweep takes."""
