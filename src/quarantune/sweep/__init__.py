"""One sweep: its inputs, the routes its configs take, and sweeps in this process."""
