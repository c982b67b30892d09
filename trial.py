"""
A trial of a residual or a decider of your own. train.py does it first of all: a model with your
class is made and run on a few tokens, and a mistake is told in a sentence, before it costs you an
hour.

It finds misspelt names, a forgotten return or a wrong shape, a look at other tokens (as far as
first weights show that), and parameters that nothing uses.
"""
import difflib

import torch
import torch.nn as nn

from model import (DECIDERS, GPT, Decider, GPTConfig, KVCache, Residual, Runner, choose,
                   residual_kind)
from options import option_defaults
from sentences import Mistake

@torch.enable_grad()
@torch.random.fork_rng(devices=[])   # It draws random numbers. They are given back.
def look_for_mistakes(config):
    """Mistake, with a sentence, if the class that config.residual or config.mod names has one of
    these mistakes"""
    kind, decider_kind = residual_kind(config).func, choose("--mod", DECIDERS, config.mod).func
    look_at_names(kind, Residual)
    look_at_names(decider_kind, Decider)
    # The depth and the width are yours, and all else is small.
    small = GPTConfig(config.residual, config.n_layer, config.n_head, config.n_embd, block_size=4,
                      vocab_size=8, mlp_ratio=0.1, mod=config.mod)
    # nn.Module.__init__ makes _modules.
    if not hasattr(residual_kind(small)(small, 1), "_modules"):
        raise Mistake(f"{kind.__name__}.__init__ must begin with super().__init__(config, l)")
    if not hasattr(choose("--mod", DECIDERS, config.mod)(small), "_modules"):
        raise Mistake(f"{decider_kind.__name__}.__init__ must begin with super().__init__(config)")
    model = GPT(small)
    look_at_gates(model, kind)
    look_at_shapes(model, kind.__name__)
    for name, decider in (kind.__name__, Decider()), (decider_kind.__name__, model.decider):
        look_at_other_tokens(model, name, decider)
        look_at_gradients(model, name, decider)
    look_at_sampling(model, kind.__name__)

def look_at_names(kind, base):
    """kind: a class that is derived from base"""
    name, own = kind.__name__, vars(kind)
    ours = base.__mro__[:base.__mro__.index(nn.Module)]   # the classes that are not torch's
    known = [each for cls in ours for each in vars(cls) if not each.startswith("_")]
    for each in own:
        near = difflib.get_close_matches(each, known, 1, 0.85)
        if near and each not in known and not each.startswith(near[0]):
            raise Mistake(f"{name} has a {each}; did you mean {near[0]}?")
    changes = [each for each in known if getattr(kind, each) is not getattr(base, each)]
    if kind is not base and not changes and "__init__" not in own:
        method = "forward" if base is Residual else "decide"
        raise Mistake(f"{name} changes nothing of {base.__name__}; write its {method}, or what "
                      f"else it should do")
    options = option_defaults(kind)
    for option in kind.allowed:
        if option not in options:
            raise Mistake(f"{name}.allowed names {option!r}; the options are "
                          f"{', '.join(options) or 'none'}")

def look_at_gates(model, kind):
    names = {parameter for each in model.residuals() for parameter, _ in each.named_parameters()}
    for gate in kind.own_lr:
        if gate not in names:
            raise Mistake(f"{kind.__name__}.own_lr names {gate!r}, and there is no such "
                          f"parameter; there are {', '.join(sorted(names))}")

def look_at_shapes(model, name):
    idx = torch.zeros(2, 3, dtype=torch.long)
    embedding = model.wte(idx)
    first = model.ends.start(embedding)
    if not isinstance(first, (torch.Tensor, tuple)):
        raise Mistake(f"{name}.start returned a {type(first).__name__}, and a stream is a "
                      f"tensor or a tuple of tensors")
    wanted = shapes_of(first)
    for _, stream in model.walk(idx, runner=Runner(model, Decider())):
        found = shapes_of(stream)
        if wanted != found and not model.ends.stream_grows:
            hint = ""
            if stream is None:
                hint = "; is a return missing?"
            elif isinstance(stream, tuple) and not isinstance(first, tuple):
                hint = "; a stream of its own form needs a method start, too"
            raise Mistake(f"{name}.forward returned {found}, expected {wanted}{hint}")
    wanted, found = shapes_of(embedding), shapes_of(model.ends.finish(stream))
    if wanted != found:
        raise Mistake(f"{name}.finish returned {found}, expected {wanted}")

def shapes_of(stream):
    """The shape of a stream's tensor, or of each, as text"""
    if isinstance(stream, tuple):
        return "(" + ", ".join(shapes_of(part) for part in stream) + ")"
    return str(tuple(stream.shape)) if torch.is_tensor(stream) else type(stream).__name__

def look_at_other_tokens(model, name, decider):
    """Compares passes in which only a later token, or only another sequence, is another one. Both
    draw the same random numbers. (In training a decider may look at later tokens: a router does.)
    """
    model.eval()
    usual = logits_of(model, decider, [[0, 1, 2, 3], [4, 5, 6, 7]])
    last = logits_of(model, decider, [[0, 1, 2, 7], [4, 5, 6, 7]])
    other = logits_of(model, decider, [[0, 1, 2, 3], [7, 6, 5, 4]])
    small = 1e-5 * max(1.0, usual.abs().max().item())
    if (usual - last)[0, :3].abs().max() > small:
        raise Mistake(f"{name} looks at later tokens: another last token changes what the first "
                      f"ones predict. Only f may look at other tokens")
    if (usual - other)[0].abs().max() > small:
        raise Mistake(f"{name} looks at other sequences of the batch. Only f may look at other "
                      f"tokens")

def logits_of(model, decider, idx):
    torch.manual_seed(0)
    return model(torch.tensor(idx), runner=Runner(model, decider))[0].detach()

def look_at_sampling(model, name):
    """In sampling, a residual gets the newest token alone. So it can't look at earlier ones."""
    model.eval()
    idx = torch.tensor([[0, 1, 2, 3]])
    whole, again = (model(idx, runner=Runner(model, Decider()))[0][0, -1] for _ in range(2))
    small = 1e-4 * max(1.0, whole.abs().max().item())
    if (whole - again).abs().max() > small:
        return   # It draws random numbers, so nothing can be compared.
    cache = KVCache(model, 1, 4)
    for token in idx.split(1, dim=1):
        newest, _ = model(token, cache=cache, runner=Runner(model, Decider()))
    if (whole - newest[0, -1]).abs().max() > small:
        raise Mistake(f"{name} looks at earlier tokens: one by one, as in sampling, they predict "
                      f"something else. Only f may look at other tokens")

def look_at_gradients(model, name, decider):
    """Those of the decider if it is the model's own, else those of all other parameters"""
    model.train()
    idx = torch.arange(8).view(2, 4)
    model(idx, idx, runner=Runner(model, decider))[1].backward()
    for parameter, p in model.named_parameters():
        is_decider = parameter.startswith("decider.")
        if p.grad is None and is_decider == (decider is model.decider):
            raise Mistake(f"{name}: the parameter {parameter} gets no gradient, so nothing uses "
                          f"it; make it only where it is used (a residual's self.is_end says: "
                          f"this one is model.ends). A comparison gives no gradient")
