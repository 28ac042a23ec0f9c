"""Random weight updates under load, and the death of all that takes part: real daemons, drivers in
separate processes, trainers. The models show which of them has sampled a token: its number modulo
NUM_MODELS. So each token's stamp is checked against the weights that have sampled it, whatever has
happened before. `python -m tests.support.stamps` runs all cases."""
