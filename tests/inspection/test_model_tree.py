"""kvad inspect --tree: every parameter stands in one node, and every drawing says what the config says."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups, group_bytes
from kvad.cli.main import main
from kvad.config.layers import (
    AlibiConfig,
    AttentionConfig,
    DynamicScalingConfig,
    LanguageHeadConfig,
    LearnedPositionsConfig,
    MoEConfig,
    RopeConfig,
    StackConfig,
    YarnScalingConfig,
)
from kvad.config.model import attention_specs
from kvad.config.parameter_shapes import num_parameters, weight_shapes
from kvad.inspection import model_tree
from kvad.inspection.component_text import ENCODING_SUPPORT, describe_allowed
from kvad.inspection.model_tree import build_model_tree, fold_indices
from kvad.inspection.plot import draw_boxes
from kvad.planning.known_models import KNOWN_MODELS, known_model
from tests.hf_parity import checkpoint as oracle
from tests.support.lab_models import CONFIGS, ENCODERS, EVERY, LAYER_NORM, PAIRS, tiny, write_checkpoint

ROOT = Path(__file__).parents[2]
NAMES = [*EVERY, *KNOWN_MODELS]


def config_of(name):
    return EVERY[name] if name in EVERY else known_model(name)


def walk(node):
    yield node
    for child in node.children:
        yield from walk(child)


def parts_of(node, part):
    return [each for each in walk(node) if each.part == part]


# ---------------------------------------------------------------- the tree


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_counted_once(name):
    config = config_of(name)
    root = build_model_tree(config, name)
    assert root.parameters == num_parameters(config) == sum(each.parameters or 0 for each in root.children)
    for each in walk(root):
        if each.children and each.part != "cache":
            assert each.parameters == sum(child.parameters or 0 for child in each.children)
    shapes = sorted(weight_shapes(config).values())
    drawn = [shape for each in parts_of(root, "embedding") + parts_of(root, "head") for shape in each.tensors.values()]
    for stack in parts_of(root, "stack"):
        drawn += [shape for each in stack.children if each.part == "norm" for shape in each.tensors.values()]
        for layers in parts_of(stack, "layers"):
            for each in layers.children:
                for tensor, shape_ in each.tensors.items():
                    shared = "(shared)" in tensor or tensor.startswith("positions.")
                    drawn += [shape_] * (1 if shared else len(layers.facts["layers"]))
    assert sorted(drawn) == shapes


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_stands_in_one_node(name):
    config = config_of(name)
    for stack, node in zip(
        [stack for stack in (config.encoder, config.decoder) if stack is not None],
        parts_of(build_model_tree(config, name), "stack"),
        strict=True,
    ):
        layers = parts_of(node, "layers")
        assert sorted(index for each in layers for index in each.facts["layers"]) == list(range(stack.num_layers))
        for each in layers:
            spec = stack.layer_types[each.facts["kind"]]
            assert all(stack.layer_config(index) == spec for index in each.facts["layers"])
            attention = next(child for child in each.children if child.part == "attention")
            assert attention.facts["num_heads"] == spec.attention.num_heads
            assert attention.facts["window"] in (spec.attention.window, None)
            assert ("both ways" in attention.title) == (not spec.attention.causal)
            assert bool(parts_of(each, "cross_attention")) == (spec.cross_attention is not None)


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_that_of_the_memory(name):
    config = config_of(name)
    found = parts_of(build_model_tree(config, name, dtype="bfloat16"), "group")
    source = config.encoder_input.max_seq_len if config.encoder_input else 0
    asked = CacheConfig(max_num_seqs=1, max_seq_len=config.max_seq_len, max_source_len=source, dtype="bfloat16")
    expected = build_groups(attention_specs(config), asked)
    assert len(found) == len(expected)
    for node, group in zip(found, expected, strict=True):
        size = group_bytes(group)
        assert (node.facts["bytes_per_token"], node.facts["bytes_per_row"]) == (size.per_token_payload, size.per_seq)
        assert (
            node.facts["is_cross_attention"] == group.spec.is_cross_attention
            and node.facts["window"] == group.spec.window
        )
        assert node.facts["layers"] == [index % config.decoder.num_layers for index in group.layers]
    if config.kind == "encoder":
        assert "no cache" in [node.title for node in parts_of(build_model_tree(config, name), "cache")]


PLACES = {
    "pre": ["norm1", "attention", "norm_cross", "cross_attention", "norm2", "mlp"],
    "post": ["attention", "norm1", "cross_attention", "norm_cross", "mlp", "norm2"],
    "after": ["attention", "norm1", "mlp", "norm2"],
    "normed": ["norm1", "attention", "norm2", "mlp"],
    "parallel": ["norm1", "attention", "mlp"],
    "parallel_pair": ["norm1", "attention", "norm2", "mlp"],
    "sandwich": [
        *(
            "norm1",
            "attention",
            "norm1_after",
            "norm_cross",
            "cross_attention",
            "norm_cross_after",
            "norm2",
            "mlp",
            "norm2_after",
        )
    ],
}


@pytest.mark.parametrize("place", PLACES)
def test_norms_stand_where_they_are_computed(place):
    """Kinds of parts in order; a norm's title says before or after what."""
    paired = "cross_attention" in PLACES[place]
    made = PAIRS["pair"].decoder.layer_types["L"] if paired else CONFIGS["plain"].decoder.layer_types["L"]
    stack = StackConfig(2, {"L": made}, norm_position=place)
    config = replace(PAIRS["pair"], decoder=stack) if paired else replace(CONFIGS["plain"], decoder=stack)
    layers = parts_of(parts_of(build_model_tree(config, "m"), "stack")[-1], "layers")[0]
    kinds = {"attention": "attention", "cross_attention": "cross_attention", "mlp": "mlp"}
    assert [child.part for child in layers.children] == [kinds.get(name, "norm") for name in PLACES[place]]
    titles = [child.title.partition(":")[0] for child in layers.children if child.part == "norm"]
    behind = [title.startswith("norm after") for title in titles]
    names = [name for name in PLACES[place] if name.startswith("norm")]
    assert behind == [name.endswith("_after") or place in ("post", "after") for name in names]
    assert place != "parallel" or titles == ["norm before attention and the MLP"]


def test_a_layer_without_its_first_norm():
    layer = replace(CONFIGS["plain"].decoder.layer_types["L"], pre_attention_norm=False)
    kinds = {"F": layer, "L": replace(layer, pre_attention_norm=True)}
    root = build_model_tree(tiny(layers=4, kinds=kinds, pattern="FLLL"), "m")
    first, rest = parts_of(root, "layers")
    assert first.title == "layer 0 (of kind F)" and first.children[0].part == "attention"
    assert rest.title == "layers 1-3 (of kind L)" and rest.children[0].part == "norm"


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ([3], "3"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 2, 4], "0, 2, 4"),
        ([0, 1, 3, 4, 6, 7, 9], "0-1, 3-4, 6-7, 9"),
        (range(0, 26, 2), "0, 2, 4 ... 24"),
        (range(5, 30, 6), "5, 11, 17, 23, 29"),
        (range(12), "0-11"),
    ],
)
def test_layers_are_folded(numbers, says):
    assert fold_indices(numbers) == says


# ---------------------------------------------------------------- what is said


def said(config):
    return model_tree.tree_to_text(build_model_tree(config, "m"))


def test_every_encoding_says_what_it_allows():
    """DESIGN's table of positions, one row per encoding, where the decoder's keys are what is kept."""
    for name, key in (
        ("learned", "learned"),
        ("sinusoidal", "sinusoidal"),
        ("plain", "rope"),
        ("alibi", "alibi"),
        ("t5", "t5"),
    ):
        allows = ENCODING_SUPPORT[key]
        nodes = [node for node in walk(build_model_tree(CONFIGS[name], name)) if node.facts.get("allows")]
        assert [node.facts["allows"] for node in nodes] == [allows._asdict()], name
        assert tuple(nodes[0].lines[-3:]) == tuple(describe_allowed(key))
    cross = parts_of(build_model_tree(PAIRS["pair"], "m"), "cross_attention")[0]
    assert cross.facts["allows"] == ENCODING_SUPPORT["source"]._asdict()
    for config in ENCODERS.values():
        assert not [node for node in walk(build_model_tree(config, "m")) if node.facts.get("allows")]
    bare = [
        node.facts["allows"]
        for node in parts_of(build_model_tree(tiny(AttentionConfig(4, position=None)), "m"), "attention")
    ]
    assert bare == [ENCODING_SUPPORT["none"]._asdict()]


def test_the_table_is_that_of_the_design():
    assert "table ends" in ENCODING_SUPPORT["learned"].eviction and "impossible" in ENCODING_SUPPORT["learned"].endless
    assert "same positions" in ENCODING_SUPPORT["sinusoidal"].reuse
    assert "rotated" in ENCODING_SUPPORT["rope"].eviction and "R(delta)" in ENCODING_SUPPORT["rope"].endless
    assert ENCODING_SUPPORT["alibi"] == ENCODING_SUPPORT["t5"] and "renumber" in ENCODING_SUPPORT["t5"].endless


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (tiny(AttentionConfig(4, 2, window=7)), ["attention, causal, a window of 7", "the last 7 tokens"]),
        (
            tiny(AttentionConfig(4, 2, window=64)),
            ["attention, causal  ", "of all tokens"],
        ),  # the limit: no window at all
        (
            tiny(AttentionConfig(4, 2, logit_softcap=5.0, sink_logits=True)),
            ["softcap 5", "a sink logit per head", "sink_logits 4"],
        ),
        (tiny(AttentionConfig(4, 1)), ["one key-value head for all"]),
        (
            tiny(AttentionConfig(4, 2, head_dim=10, value_dim=3)),
            ["4 heads of 10, values of 3", "2 key-value heads of 10 + 3"],
        ),
        (tiny(AttentionConfig(4, qk_norm="head"), norm=LAYER_NORM), ["q and k normed per head, one weight"]),
        (
            tiny(AttentionConfig(4, head_dim=8, position=RopeConfig(5e5, 0.5, True))),
            ["theta 500,000, of the first 0.5", "interleaved"],
        ),
        (
            tiny(AttentionConfig(4, head_dim=8, position=RopeConfig(scaling=DynamicScalingConfig(2.0, 32)))),
            ["dynamic scaling, factor 2, made for 32", "by a row's limit"],
        ),
        (
            tiny(AttentionConfig(4, head_dim=8, position=RopeConfig(scaling=YarnScalingConfig(4.0, 16)))),
            ["yarn scaling, factor 4, made for 16"],
        ),
        (
            tiny(AttentionConfig(6, 2, position=AlibiConfig(0.5, round_to_bfloat16=True))),
            ["slopes times 0.5, rounded to bfloat16"],
        ),
        (tiny(mlp=MoEConfig(40, 8, 2, router_bias=True)), ["8 experts of 40", "goes to 2 of them", "with bias"]),
        (tiny(mlp=MoEConfig(40, 2, 1, swiglu_alpha=1.7, swiglu_limit=7.0)), ["sigmoid(1.7 gate), cut to 7"]),
        (
            tiny(AttentionConfig(4, softmax_scale=0.25, clip_qkv=8.0, qkv_bias=True)),
            ["scale 0.25", "q, k, v cut to 8", "bias of q, k, v"],
        ),
        (
            tiny(head=LanguageHeadConfig(logit_scale=0.5, logit_softcap=30.0, bias=True), tie_embeddings=False),
            ["times 0.5, softcap 30, bias", "of its own"],
        ),
        (CONFIGS["learned"], ["learned positions, a table of 66, offset 2", "eviction: exact until the table ends"]),
        (CONFIGS["t5 per layer"], ["8 buckets up to distance 16, one way, a table per layer"]),
        (PAIRS["pair of widths"], ["encoder, 3 layers of width 30", "of 48 of source", "k 12x30"]),
        (PAIRS["pair post"], ["norm after cross-attention", "sinusoidal positions, interleaved, base 10,000"]),
        (ENCODERS["encoder classes"], ["head: 3 labels per token", "a, b, c"]),
        (ENCODERS["encoder rows"], ["head: 2 labels per row, of its first state", "first a matrix, bias, tanh"]),
        (ENCODERS["encoder pooled"], ["head: a vector per row", "the mean"]),
    ],
)
def test_what_a_config_says_is_said(config, says):
    text = said(config)
    for words in says:
        assert words in text, text


# ---------------------------------------------------------------- drawings


@pytest.mark.parametrize("name", NAMES)
def test_text_fits_a_hundred_columns_and_cuts_nothing(name):
    root = build_model_tree(config_of(name), name)
    lines = model_tree.tree_to_text(root).splitlines()
    assert max(map(len, lines)) <= 100 and not any(line != line.rstrip() for line in lines)
    plain = " ".join(" ".join(re.sub("[│├└─]", " ", line).split()) for line in lines)
    for node in walk(root):
        for line in node.lines:
            assert " ".join(line.split()) in plain
        for shape_ in node.tensors.values():
            assert "x".join(map(str, shape_)) in plain


@pytest.mark.parametrize("name", ["plain", "pair t5", "gemma-2-9b", "bert-base", "t5-base"])
def test_svg_has_every_text_and_boxes_below_one_another(name, tmp_path):
    root = build_model_tree(config_of(name), f'{name} <&"$x$>')
    boxes = model_tree.tree_to_boxes(root)
    assert [box.title for box in boxes] == [node.title for node in walk(root)]
    path = tmp_path / "tree.svg"
    assert draw_boxes(boxes, [path]) == [path]
    tree = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [each.text for each in tree.iter(f"{space}text")]
    for box in boxes:
        assert box.title in texts and all(line in texts for line in box.lines) and (not box.note or box.note in texts)
    *_, wide, high = map(float, tree.get("viewBox").split())
    outlines = [each.get("d") for each in tree.iter(f"{space}path") if "fill: #f6f7f9" in each.get("style", "")]
    assert len(outlines) == len(boxes)
    end = 0.0
    for outline in outlines:
        numbers = [float(number) for number in re.findall(r"[\d.]+", outline)]
        assert min(numbers[::2]) >= 0 and max(numbers[::2]) <= wide and end <= min(numbers[1::2])
        end = max(numbers[1::2])
    assert end <= high
    assert not [each for each in tree.iter() if each.tag.endswith(("image", "script", "foreignObject"))]


@pytest.mark.parametrize("name", ["plain", "pair t5", "gemma-2-9b", "encoder classes"])
def test_mermaid_is_a_flowchart_of_every_node(name):
    root = build_model_tree(config_of(name), 'a "name" #1')
    lines = model_tree.tree_to_mermaid(root).splitlines()
    assert lines[0] == "flowchart LR"
    nodes = [line for line in lines if re.fullmatch(r"  n[\d_]+\[\"[^\"]*\"\]:::\w+", line)]
    edges = [line for line in lines if re.fullmatch(r"  n[\d_]+ --> n[\d_]+", line)]
    classes = [line for line in lines if line.startswith("  classDef ")]
    assert len(nodes) == len(list(walk(root))) == len(edges) + 1
    assert 1 + len(nodes) + len(edges) + len(classes) == len(lines)
    assert "a #quot;name#quot; #35;1" in nodes[0]
    known = {line.split()[1] for line in classes}
    assert {line.rpartition(":::")[2] for line in nodes} <= known


@pytest.mark.parametrize("name", NAMES)
def test_json_holds_it_all(name):
    root = build_model_tree(config_of(name), name)
    found = json.loads(json.dumps(model_tree.tree_to_json(root)))

    def same(node, data):
        assert (data["title"], data["lines"], data["parameters"]) == (node.title, list(node.lines), node.parameters)
        assert {key: tuple(value) for key, value in data["tensors"].items()} == dict(node.tensors)
        for child, inner in zip(node.children, data["children"], strict=True):
            same(child, inner)

    same(root, found)
    assert found["facts"]["kind"] == config_of(name).kind


# ---------------------------------------------------------------- the command


def run(capsys, *arguments):
    code = main(["inspect", *map(str, arguments)])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_of_a_checkpoint_a_shape_and_a_config(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "run", CONFIGS["pattern"])
    code, out, err = run(capsys, folder, "--tree")
    assert (code, err) == (0, "") and out.startswith("run, a decoder") and "layers 0-1, 3-4 (of kind L)" in out
    (tmp_path / "m.json").write_text(json.dumps(CONFIGS["pattern"].to_dict()))
    assert run(capsys, tmp_path / "m.json", "--tree")[1].splitlines()[1:] == out.splitlines()[1:]
    code, out, _ = run(capsys, "T5-small", "--tree")
    assert code == 0 and out.startswith("t5-small, an encoder-decoder") and "60,506,624" in out


def test_of_every_golden_folder(tmp_path):
    """Every family of Hugging Face's that kvad reads, as transformers writes it."""
    from kvad.planning.report import read_target

    seen = set()
    for name in oracle.names("5"):
        meta, _ = oracle.load("5", name)
        if meta["config"].get("rotary_value"):
            continue
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(oracle.text(meta["config"]))
        target = read_target(str(folder))
        root = build_model_tree(target.config, name)
        assert root.parameters == num_parameters(target.config)
        assert max(map(len, model_tree.tree_to_text(root).splitlines())) <= 100
        seen.add(target.origin)
    assert {"llama", "gemma2", "t5", "bert", "marian", "modernbert"} <= seen


def test_formats_and_files(tmp_path, capsys):
    text = run(capsys, "gpt2", "--tree")[1]
    assert run(capsys, "gpt2", "--tree", "--format", "text")[1] == text
    assert run(capsys, "gpt2", "--tree", "--format", "mermaid")[1].startswith("flowchart LR")
    first, second = run(capsys, "gpt2", "--tree", "--json")[1], run(capsys, "gpt2", "--tree", "--format", "json")[1]
    assert json.loads(first) == json.loads(second) and json.loads(first)["parameters"] == 124_439_808
    for name, start in (("a.svg", "<?xml"), ("a.txt", "gpt2"), ("a.mmd", "flowchart"), ("a.json", "{")):
        code, out, err = run(capsys, "gpt2", "--tree", "--out", tmp_path / name)
        assert (code, out, err) == (0, "", "") and (tmp_path / name).read_text().startswith(start)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tree", "--attention", "x"], "--tree and --attention exclude each other"),
        (["--tree", "--tensors"], "--tensors and --tree exclude each other"),
        (["--tree", "--check"], "--check and --tree exclude each other"),
        (["--tree", "--layer", "1"], "--layer needs --attention TEXT"),
        (["--tree", "--format", "terminal"], "--tree has no format terminal: text, svg, mermaid, json"),
        (["--attention", "x", "--format", "mermaid"], "--attention has no format mermaid: terminal, svg, png, json"),
        (["--tree", "--out", "tree.png"], "tree.png: the suffix is not a known format"),
        (["--tree", "--json", "--format", "svg"], "exclude each other"),
        (["--format", "text"], "--format needs --tree or --attention TEXT"),
    ],
)
def test_options_that_cannot_be(capsys, arguments, says):
    code, out, err = run(capsys, "gpt2", *arguments)
    assert (code, out) == (2, "") and says in err


def test_a_name_that_is_not_known(capsys):
    code, _, err = run(capsys, "gema-2-2b", "--tree")
    assert code == 2 and "did you mean 'gemma-2-2b'?" in err


def test_no_torch_is_loaded():
    program = (
        "import sys\nfrom kvad.cli.main import main\n"
        "code = main(['inspect', 't5-base', '--tree', '--format', 'svg'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "</svg>" in ran.stdout, ran.stderr


def test_an_absolute_position_is_said_once():
    text = said(
        tiny(
            AttentionConfig(4, position=None),
            embedding=replace(CONFIGS["plain"].embedding, position=LearnedPositionsConfig(64)),
        )
    )
    assert text.count("eviction:") == 1
