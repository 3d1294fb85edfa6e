"""Who may speak: a device is known by its key, and no key outlives its revocation."""
