#!/usr/bin/env bash
# x-transformers 2.31.10, torch 2.13.0, CPU. Our guess: with num_residual_streams=4 (hyper-connections; the docstring
# names the paper on manifold-constrained mixing matrices) the 4x4 matrix that mixes the streams is doubly stochastic,
# whatever is in them, so that layers which add nothing leave the size of the streams as it is.
# Seen: it is all ones, for any weights. Each stream becomes the sum of all four, so the streams grow by 4 in each
# sublayer and by 16 in each block (attention and feed-forward). The four are equal before each addition, the
# parameters of the mixing get a gradient of exactly 0, and in a model of 6 blocks the last one hardly changes the
# logits and gets nearly no gradient: what it adds is a millionth of what is there. There is no warning.
# (Why: the row of four weights of each stream is balanced as a matrix of 1 x 4, whose columns have one number each.)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q x-transformers==2.31.10 torch==2.13.0 numpy==2.3.5 einops==0.8.2 einx==0.4.3 \
    torch-einops-utils==0.2.0 2>/dev/null
OMP_NUM_THREADS=1 "$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata
import torch
from x_transformers import Decoder, TransformerWrapper
from x_transformers.x_transformers import HyperConnection

print("x-transformers", importlib.metadata.version("x-transformers"), "torch", torch.__version__)

def language_model(streams, depth):
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=depth, heads=2, attn_dim_head=16, num_residual_streams=streams, verbose=False)
    return TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)

# the mixing matrix, read off from four streams that are the unit vectors, with random parameters
torch.manual_seed(0)
connection = HyperConnection(4, layer_index=0, num_residual_streams=4)
for parameter in connection.parameters():
    parameter.data.normal_()
matrix = connection.prepare(torch.eye(4)[:, None])[1][0, 0]
print("mixing matrix:", matrix.tolist())

# streams through blocks that add nothing
nothing = Decoder(dim=32, depth=6, heads=2, num_residual_streams=4, zero_init_branch_output=True, verbose=False)
hiddens = nothing(torch.randn(1, 8, 32), return_hiddens=True)[1].hiddens
sizes = [hidden.square().mean().sqrt().item() for hidden in hiddens]
print("size of what enters block 1 to 6:", [round(size, 1) for size in sizes])

tokens = torch.randint(0, 50, (2, 10))
share, change = {}, {}
for streams in 1, 4:
    model = language_model(streams, 6)
    logits = model(tokens)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    first, last = (model.attn_layers.layers[i][1].to_out.weight for i in (0, 10))
    share[streams] = (last.grad.norm() / first.grad.norm()).item()
    mixing = model.attn_layers.layers[0][2].static_alpha.grad[:, 1:] if streams == 4 else None
    with torch.no_grad():
        for layer in model.attn_layers.layers[10:]:   # the last block: attention, feed-forward
            for parameter in layer[1].parameters():
                parameter.zero_()
        change[streams] = (model(tokens) - logits).abs().max().item()
    print(f"{streams} streams: gradient of the last block's to_out / the first block's {share[streams]:.1e}, "
          f"without the last block the logits change by {change[streams]:.1e}")
print("gradient of the mixing parameters:", mixing.abs().max().item())

assert torch.allclose(matrix, torch.ones(4, 4)), "this has changed"
assert all(12 < b / a < 18 for a, b in zip(sizes, sizes[1:])), "this has changed"
assert mixing.abs().max() == 0 and share[4] < 1e-4 < 0.1 < share[1], "this has changed"
assert change[4] < 1e-4 < 0.1 < change[1], "this has changed"
PYTHON
