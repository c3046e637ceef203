"""The sandbox: a template process that forks contained workers, and the wire to them."""
