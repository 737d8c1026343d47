"""duly in other people's programs: test runners, task queues, frameworks. Each is thin, and imported by
name."""
