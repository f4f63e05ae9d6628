"""Ranks that do not find or reach each other: gloo, the TCP store, network interfaces, InfiniBand."""

from __future__ import annotations

from sgdiag.model import Advice, Family, Finding, Incident, Sighting, Verdict
from sgdiag.rules.postmortem.collectives.shared import served_on, waited
from sgdiag.rules.postmortem.quotes import if_seen
from sgdiag.rules.postmortem.registry import Explanation, explains

_FAMILY: Family = "nccl-version-fabric-or-network"

_INTERFACES = Advice(
    "name one interface, the one that the nodes reach each other by, on every node",
    "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
    "gloo and NCCL bind to its address",
)

_COMPLETIONS = {
    4: "the adapter may not reach that memory: GPUDirect (nvidia-peermem, ACS, IOMMU)",
    5: "the work was flushed: the connection had failed before",
    10: "the remote adapter refused the access",
    12: "no acknowledgement after all retries: wrong GID or route, a switch that drops, or the peer has died",
    13: "the peer was not ready to receive: it is stuck or has died",
}
"""InfiniBand work completion status codes (``enum ibv_wc_status``) that NCCL prints as numbers."""


@explains("gloo-loopback", "gloo-mesh-failed")
def gloo_mesh(incident: Incident) -> Explanation | None:
    mesh, fallback = incident.first("gloo-mesh"), incident.first("gloo-loopback")
    remotes = [one.fields["remote"] for one in incident.seen("gloo-mesh") if "remote" in one.fields]
    loopback = fallback is not None or any(_is_loopback(remote) for remote in remotes)
    many_nodes = incident.snapshot.server.nnodes.or_else(1) > 1
    if mesh is None:
        # On one host the loopback address is as good as any other.
        if fallback is None or not many_nodes or incident.ready:
            return _loopback_told(incident)
        return Explanation(_loopback((fallback,), "WARN", 0.6), fallback, "cause")
    seen = tuple(one for one in (fallback, mesh) if one is not None)
    if loopback:
        return Explanation(_loopback(seen, "FAIL", 0.95), seen[0], "cause")
    finding = Finding(
        id="gloo-mesh-failed",
        title="gloo could not connect every rank with every other",
        verdict="FAIL",
        family=_FAMILY,
        confidence=0.85,
        evidence=tuple(one.evidence() for one in seen),
        cause="gloo opens a connection between each two ranks on ports that the kernel picks: an interface that the"
        " other nodes do not reach, a firewall, or a rank that died meanwhile",
        advice=(
            _INTERFACES,
            Advice(
                "let all ports pass between the nodes", "--network=host, no firewall between them", "the mesh forms"
            ),
            Advice("look on the other nodes for a rank that died first", "sgdiag explain LOG_OF_EACH_NODE"),
        ),
    )
    return waited(incident, finding, mesh, "cause")


def _loopback_told(incident: Incident) -> Explanation | None:
    told = incident.first("gloo-loopback-told")
    if told is None or incident.ready:
        return None
    return Explanation(_loopback((told,), "FAIL", 0.55), told, "symptom")


def _loopback(seen: tuple[Sighting, ...], verdict: Verdict, confidence: float) -> Finding:
    return Finding(
        id="gloo-loopback",
        title="gloo bound to the loopback address: other nodes cannot reach it",
        verdict=verdict,
        family=_FAMILY,
        confidence=confidence,
        evidence=tuple(one.evidence() for one in seen),
        cause="the host's name does not resolve to an address of the host (/etc/hosts says 127.0.0.1 or nothing), so"
        " every rank told the others to connect to 127.0.0.1",
        told="torch's warning names GLOO_SOCKET_IFNAME, and is right; harmless only where all ranks share one host"
        if any("GLOO_SOCKET_IFNAME" in one.text for one in seen)
        else "",
        advice=(
            _INTERFACES,
            Advice("or make the name resolve", "getent hosts $(hostname)", "the address that the other nodes use"),
        ),
    )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1", "::ffff:127.0.0.1")


@explains("socket-interface-unknown")
def interface(incident: Incident) -> Explanation | None:
    at = incident.first("gloo-no-interface", "nccl-no-interface")
    if at is None:
        return None
    name = at.fields.get("interface", "").rstrip(".,;")
    gloo = at.sign == "gloo-no-interface"
    if gloo and (name.startswith(("^", "=")) or "," in name):
        cause = f"'{name}' is NCCL's way to exclude or list interfaces; gloo takes the name of one interface only"
    elif gloo:
        cause = f"there is no interface or address '{name}' on this host, or it has no address"
    else:
        cause = "NCCL_SOCKET_IFNAME matches no interface that is up and has an address on this host"
    finding = Finding(
        id="socket-interface-unknown",
        title="the socket interface that was asked for is not there",
        verdict="FAIL",
        family=_FAMILY,
        confidence=0.9,
        evidence=(at.evidence(),),
        cause=cause,
        advice=(Advice("list the names, on every node", "ip -br addr", "they often differ between nodes"), _INTERFACES),
    )
    return Explanation(finding, at, "cause")


@explains("rendezvous-failed")
def rendezvous(incident: Incident) -> Explanation | None:
    at = incident.first("rendezvous-incomplete", "rendezvous-unreachable", "store-timeout")
    if at is None:
        return None
    incomplete = "joined" in at.fields
    if incomplete:
        cause = (
            f"{at.fields['joined']} of {at.fields['expected']} ranks came within {at.fields['waited_s']} s: the others"
            " did not start, died, or were given another address or number of nodes"
        )
    elif "address" in at.fields:
        cause = f"nothing answers at {at.fields['address']}: the first node is not up, or its port is not reachable"
    else:
        cause = (
            "a rank waited for an entry that the first rank writes when it gets as far: that one is late, stuck or dead"
        )
    finding = Finding(
        id="rendezvous-failed",
        title="the ranks did not meet",
        verdict="FAIL",
        family=_FAMILY,
        confidence=0.85 if incomplete or "address" in at.fields else 0.6,
        evidence=(at.evidence(),),
        cause=cause,
        advice=(
            Advice(
                "compare what the nodes were started with",
                "--dist-init-addr, --nnodes, --node-rank, --tp-size",
                "the same address and sizes, a node rank for each node",
            ),
            Advice("reach the first node from the others", "nc -vz HOST PORT", "connected"),
            Advice("if nodes are only slow to start", "--dist-timeout 3600", "the first waits longer"),
        ),
    )
    return waited(incident, finding, at, "cause" if incomplete or "address" in at.fields else "symptom")


_UNREACHABLE = ("No route to host", "Network is unreachable", "Cannot assign requested address", "Permission denied")
"""Answers of the network itself; a refused connection is also what a rank sees whose peer has died."""


@explains("nccl-socket-failed")
def sockets(incident: Incident) -> Explanation | None:
    at = incident.first("nccl-socket")
    if at is None or served_on(incident):
        return None
    error = next((name for name in (*_UNREACHABLE, at.fields.get("error", "")) if name and name in at.text), "")
    unreachable = error in _UNREACHABLE
    finding = Finding(
        id="nccl-socket-failed",
        title="a rank cannot connect to another rank's address",
        verdict="FAIL",
        family=_FAMILY,
        confidence=0.9 if unreachable else 0.8,
        evidence=tuple(one.evidence() for one in incident.seen("nccl-socket")[:2]),
        cause=(
            f"NCCL meets over TCP, whatever it sends the data by{f', and was told: {error}' if error else ''}. "
            + (
                "The ranks took interfaces between which there is no route (a bridge of Docker, a storage network), or "
                "a firewall rejects"
                if unreachable
                else "A firewall or a wrong interface; or the rank at the other end has died"
            )
        ),
        told=if_seen(
            incident, "nccl-error", "the exception does not say which connection; NCCL's WARN line has the address"
        ),
        advice=(
            _INTERFACES,
            Advice(
                "reach that address from this node", "ip route get ADDRESS; nc -vz ADDRESS PORT", "a route, an answer"
            ),
            Advice("let all ports pass between the nodes", "--network=host, no firewall between them"),
        ),
    )
    return waited(incident, finding, at, "cause")


@explains("nccl-infiniband")
def infiniband(incident: Incident) -> Explanation | None:
    at = incident.first("nccl-ib-call", "nccl-ib-completion", "nccl-ib-event")
    if at is None or served_on(incident):
        return None
    status = int(at.fields.get("status", -1))
    call, error = at.fields.get("call", ""), at.fields.get("error", "").strip()
    locked = "Cannot allocate memory" in error
    if locked:
        cause = f"{call} may not lock memory: the limit on locked memory is too low"
    elif call:
        cause = f"{call} failed{f' ({error})' if error else ''}: the adapter, its port or its GID is not usable"
    elif at.sign == "nccl-ib-event":
        cause = f"the adapter reported {at.fields.get('event', 'that it cannot be opened')}: port, cable or driver"
    else:
        cause = _COMPLETIONS.get(status, f"the adapter reported status {status} for a transfer")
    finding = Finding(
        id="nccl-infiniband",
        title="NCCL's InfiniBand or RoCE transport failed",
        verdict="FAIL",
        family=_FAMILY,
        # Retries that run out are also what a rank sees whose peer has died.
        confidence=0.7 if status in (5, 12, 13) else 0.85,
        evidence=(at.evidence(),),
        cause=cause,
        advice=(
            Advice("lift the limit", "docker run --ulimit memlock=-1 …", "memory can be registered")
            if locked
            else Advice(
                "name the adapters and, for RoCE, the GID",
                "NCCL_IB_HCA=mlx5_0 NCCL_IB_GID_INDEX=3",
                "show_gids lists both",
            ),
            Advice("go over TCP to confirm", "NCCL_IB_DISABLE=1", "works, slower: then it is the fabric"),
            Advice("check ports and errors", "ibstat; perfquery; dmesg -T | grep -i mlx5"),
        ),
    )
    return waited(incident, finding, at, "cause")
