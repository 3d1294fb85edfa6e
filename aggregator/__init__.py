"""The server: registry, rounds, aggregation methods, durable store, operator's command line."""
