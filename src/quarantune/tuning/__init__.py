"""How the config of a call is found out: by a sweep over its configs."""
