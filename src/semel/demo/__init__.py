"""`semel demo`: a pipeline is killed again and again, beside the same thing in plain Spark, and both are audited.

orders     the seeded input, and the thread that writes it file by file
plan       when and where each life is killed, from the seed
pipelines  the pipeline file that `semel run` gets; read it first; kafka_pipelines is that of `--kafka`
baseline   the same in plain Spark, as people write it; kafka_baseline with Spark's own Kafka sink
shops      where a side reads and writes: files and SQLite; kafka_shop is a broker with its topics
child      one life of a process group: start, events, kill
side       all lives of one contestant
audit      input against output
game       both sides at once, then the result
screen     what the terminal shows
timeline   the picture
"""
