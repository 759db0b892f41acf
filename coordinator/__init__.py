"""The coordinator process: owner of segments, leases and budgets. Never imports torch."""
