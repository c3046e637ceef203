"""Results on web servers and in buckets: an object for each function, in the format of the cache."""
