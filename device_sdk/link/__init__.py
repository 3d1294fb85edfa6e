"""MQTT and nothing else: a link carries bytes and knows no message."""
