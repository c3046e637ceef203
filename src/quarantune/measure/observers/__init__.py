"""Observers of a run measure figures other than its time, in a worker: after timing a config, and in the final.

An observer is one file here, and one name in `OBSERVERS` of `measure/observing.py`. `measure/objective.py` decides
which observers a sweep needs.
"""
