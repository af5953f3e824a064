"""How a Spark session is made that semel runs well in: `semel.configure`, and what `semel run` does by itself."""
