"""Rollouts that other trainers wrote to disk, read as one stream of records; `formats` has the table of formats."""
