"""The devices that exist, and leases on them."""
