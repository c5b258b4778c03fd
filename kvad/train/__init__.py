"""Training: documents -> packed Steps -> AdamW -> checkpoints that go on to the bit.  Never imports cache or engine.

``kvad.train.job.train(config, corpus, out)`` does all of it; ``kvad.train.trainer`` is the loop.
"""
