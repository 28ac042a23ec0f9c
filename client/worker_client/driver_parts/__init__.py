"""Optional features of a driver: uploads of requests (request_uploads.py) and prefixes that outlive
their driver (kept_prefixes.py)."""
