"""Integrations with other people's frameworks: thin, each for programs that use that framework."""
