"""
Muon, an optimizer for matrices (Jordan et al. 2024). The momentum of the gradient is made
orthogonal, so that a step is equally large in every direction, not just where gradients are large.

torch.optim.Muon can do the same, but always in bfloat16, which is very slow on many CPUs.
"""
import torch

class Muon(torch.optim.Optimizer):
    """groups: as for any optimizer, with a weight_decay each. Entries of a step are about as large
    as those of AdamW (arXiv:2502.16982). Still, a higher lr is best: 0.02 in our models, where
    AdamW wants 0.006."""
    def __init__(self, groups, lr, momentum=0.95):
        super().__init__(groups, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            momentum = group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                mean = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = orthogonal(p.grad.lerp(mean, momentum))   # one step ahead: Nesterov's way
                p.mul_(1 - group["lr"] * group["weight_decay"])
                # Its entries have the rms 1 / sqrt(longer side). Those of AdamW's are near 0.2.
                p.sub_(update, alpha=0.2 * max(p.shape) ** 0.5 * group["lr"])

def orthogonal(x):
    """A matrix with the directions of x, whose singular values are roughly 1: about 0.7 to 1.2, but
    less if they were much below a hundredth of the norm. Five steps of a polynomial bring them
    there (Newton-Schulz). It is fast, and need not be exact."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x   # x @ x.T is then the smaller one of two products.
    if x.is_cuda:
        x = x.bfloat16()
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x
