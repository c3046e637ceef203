"""The routes of trials through processes, one a file; `choosing` says which a sweep takes."""
