"""Flags, their values, and commands that 0.2.0 removed, each with its replacement."""

REMOVED = {
    **dict.fromkeys(("--url", "--ip"), "the address alone, as in ./eb load http://localhost:8500"),
    "--shadow": "POST /what-if, or the what-if card of the live page",
    "--shadow-cost": "POST /what-if, whose cost model is fitted to the server's own steps",
    **dict.fromkeys(
        ("--preemption", "--swap-gbps", "--swap-space"),
        "--open-ended, whose preempted requests are recomputed, as the server does",
    ),
    "--tgi-metrics": "the vllm:* metrics of GET /metrics, which have the same figures",
    "--no-requests": "'fleet --replicas 1', which forgets each request that has its answer",
    "--no-open": "the command without it, as no report is opened",
    "compare --original": "docs/results/comparison.md, which has the original's figures",
    "--readme": "table.md and plots/ in the folder of the results",
    "--server-flag": "the flag itself, such as --model bard",
    **dict.fromkeys(
        ("plan --out", "fleet --out", "prefix --out", "arena --out"), "the JSON on stdout, which has all figures"
    ),
    "prefix --trace": "'run dynamic --trace FILE --kv-tokens 65536', which reports the hits",
    "validate --url": "the lanes of POST /what-if, or for other servers './eb fit LOG --held-out 50'",
    **dict.fromkeys(
        ("--over batch", "--over cache", "--over pinned", "--over speculate", "--over variance"),
        "compare, in which flags may follow a policy: compare 'dynamic --max-batch-size 8' 'dynamic --max-batch-size 16'",
    ),
    "--workload original-normal": "--workload original, whose lengths are cut to 1 to 200",
    **dict.fromkeys(("--cost roofline", "--cost scheduler-sim"), "'calibrate', which writes a law that was measured"),
    "--users": "sweep --over users --values N",
    "--config-out": "--address auto, which uses a running Ray cluster",
    "vllm replay": "'vllm watch', whose page shows the recorded steps and simulates their requests",
    "adversary --replay": "'run POLICY OTHER --trace FILE', which serves the trace with both",
    "--average": "--upscale-delay and --downscale-delay, for which more or fewer must be wanted",
    "--shortest-queue": "'fleet --router least-loaded --replicas N', in which each request joins the shortest queue",
    "--engine ragged": "a policy that does not pad, such as dynamic",
    "--engine padded": "a policy that pads, such as static",
    "--learn": "a new calibration, whose timings set the width of the intervals",
    "--statistic": "the median, with more --steps",
    "--copies": "--speed N, which raises the load of a trace",
    **dict.fromkeys(
        (
            f"{command} {flag}"
            for command in ("run", "plan", "fleet")
            for flag in ("--pinned-prefixes", "--pinned-pages")
        ),
        "'simulate prefix --kinds trie', or the server's own --pinned-prefixes",
    ),
    "predict": "'compare', which writes its predictions beside the measurements",
}


def removed(name: str) -> str:
    """Return a sentence that names the replacement of a removed flag or command, or an empty string."""
    return f"{name} was removed in 0.2.0. Use {REMOVED[name]}" if name in REMOVED else ""
