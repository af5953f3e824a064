"""What source and sink for Kafka share: settings, and tokens for a login."""
