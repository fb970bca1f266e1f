"""The papers' experiments, done again in virtual time: one file each, an essay on top, rows and claims below."""
