"""Authentication and authorization: keys, ZAP, roles, connection limits."""
