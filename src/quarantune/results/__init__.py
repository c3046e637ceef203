"""Results: shows them, saves them and makes them from the cache."""
