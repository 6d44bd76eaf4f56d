"""Tasks as tensorflow-datasets: builders that write array_record, and a source that training pipelines read.

Needs the `tfds` extra, which brings no TensorFlow: nothing here calls for it.
"""
