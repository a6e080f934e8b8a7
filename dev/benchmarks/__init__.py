"""What measures the engine: offline, over HTTP, against the machine's own limit. Timings live here, not in tests."""
