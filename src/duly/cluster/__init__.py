"""Several hubs on one ledger: hints between them, and which hub holds which device."""
