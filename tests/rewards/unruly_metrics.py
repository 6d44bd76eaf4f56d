"""Metrics that misbehave, for the pool's workers to import by name."""

import os
import signal
import sys
import time


def by_prediction(prediction, answers):
    """Do what the prediction says."""
    if prediction == "hang":
        time.sleep(3600)
    elif prediction == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif prediction == "exit":
        sys.exit(3)
    elif prediction == "raise":
        raise LookupError("no such thing")
    elif prediction == "nan":
        return float("nan")
    elif prediction == "text":
        return "much"
    elif prediction == "number as text":
        return "0.5"
    elif prediction == "nothing":
        return None
    elif prediction == "print":
        print("a line that is nobody's protocol")
    return 1.0


def process_id(prediction, answers):
    return os.getpid()


def process_id_after_a_while(prediction, answers):
    time.sleep(0.3)
    return os.getpid()


def jax_was_imported(prediction, answers):
    return "jax" in sys.modules
