"""Running an experiment: sessions, chunks, shards and summaries."""
