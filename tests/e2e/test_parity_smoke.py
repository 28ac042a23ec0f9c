from tests.support.checkpoints import prompts
from tests.support.serving import generate, greedy_request
import pytest, time
@pytest.mark.parametrize("shape",[(1,1),(2,1),(2,2)])
def test_smoke(serve, checkpoint, shape):
    t=time.time()
    c = checkpoint(seed=1); print('ckpt',time.time()-t); t=time.time()
    ps = prompts(0, [3, 9, 17, 40])
    ref=[c.greedy(p,16) for p in ps]; print('ref',time.time()-t); t=time.time()
    print(ref)
    with serve(c.path, *shape) as (group, loaded):
        print('serve',time.time()-t, loaded.seconds); t=time.time()
        run = generate(group, loaded, [greedy_request(str(i), p, 16) for i, p in enumerate(ps)])
        print('gen',time.time()-t, run.most_in_flight); t=time.time()
    assert [run.tokens[str(i)] for i in range(4)] == ref
