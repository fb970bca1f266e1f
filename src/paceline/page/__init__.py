"""The live page of a run: a small web server in a process of its own, which reads what the run writes down."""
