"""Training: documents -> packed Steps -> AdamW -> checkpoints that go on to the bit.  Never imports cache or engine.

``kvad.train.loop.run.train_model(config, corpus, out)`` does all of it; ``kvad.train.loop.trainer`` is the loop.
"""
