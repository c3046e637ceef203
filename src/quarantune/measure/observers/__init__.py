"""Observers of a run measure figures other than its time, in a worker: once a config was timed, and in the final.

An observer is one file here, and one line in `OBSERVERS`. `measure/objective.py` decides which of them a sweep needs.
"""
