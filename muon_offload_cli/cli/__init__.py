"""Typer commands: parse, call, print. The only error boundary, and the only part that draws."""
