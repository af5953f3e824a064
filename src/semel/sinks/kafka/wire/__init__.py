"""The protocol of Kafka, as far as semel speaks it itself: connections, requests, record batches, a producer."""
