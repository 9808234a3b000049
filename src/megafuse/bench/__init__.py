"""Timer, baselines, roofline, traffic and records; refuses to time what did not validate."""
