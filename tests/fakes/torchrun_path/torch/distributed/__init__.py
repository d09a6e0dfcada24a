"""Stands in for torch on the path of a launcher under test, so that no test waits for the real one."""
