"""The C++ kernels; see csrc/module.cpp. Addresses are those of live, contiguous tensors."""

def isa() -> str: ...
def set_isa(name: str) -> None: ...
def pin(processors: list[int]) -> None: ...
def attention(addresses: list[int], scale: float, softcap: float, type: int) -> None: ...

class Linear:
    kind: int
    inputs: int
    outputs: int
    block: int
    weight: int
    scale: int
    offset: int
    bias: int

class Layer:
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    rope: int
    interleaved: bool
    scale: float
    softcap: float
    activation: int
    slots: int
    attn_norm: int
    post_attn_norm: int
    mlp_norm: int
    post_mlp_norm: int
    head_norm: int
    q_norm: int
    k_norm: int
    sinks: int
    key_block: int
    kv_type: int
    k_pool: int
    v_pool: int
    k_pool_scale: int
    v_pool_scale: int

class Step:
    rows: int
    threads: int
    positions: int
    tokens: int
    hidden: int
    out: int
    def view(self, addresses: list[int]) -> None: ...
    def layer(self, view: int, keep: int, kept: int) -> None: ...

class Model:
    hidden: int
    eps: float
    layer_norm: bool
    parallel: bool
    embed_scale: float
    head: Linear
    type: int
    final_norm: int
    def rope(self, inv_freq: int, half: int, factor: float) -> None: ...
    def add(self, layer: Layer) -> None: ...
    def forward(self, step: Step) -> None: ...

def linear(weight: Linear, x: int, x_stride: int, rows: int, out: int, stride: int, threads: int) -> None: ...
def pack_rounded(weight: Linear, rows: int, type: int, threads: int) -> None: ...
def unpack_row(weight: Linear, row: int, to: int) -> None: ...
def argmax(x: int, stride: int, rows: int, n: int, threads: int) -> tuple[list[int], list[float]]: ...
def race(logits: int, n: int, temperature: float, key: int, threads: int) -> list[int]: ...
def quantise(addresses: list[int]) -> None: ...

class Search:
    def __init__(self, head: Linear, threads: int) -> None: ...
    def best(self, x: int, stride: int, rows: int, threads: int) -> tuple[list[int], list[float]]: ...
