"""Rollouts that other trainers wrote to disk, read as one stream of records; `table` lists the formats."""
