"""Tests of bidirl; `make test` runs the base ones."""
