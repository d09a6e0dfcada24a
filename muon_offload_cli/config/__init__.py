"""The run that was asked for: its schema, how it is composed, and the rules that it must meet."""
