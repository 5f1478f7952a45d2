"""The names of gRPC's options, and gRPC's defaults.

gRPC has no public list. `KNOWN` has the names of its own header that are in the binary of the
version `PROVED_ON`; tests/unit/options/test_names.py compares it with the installed version.
"""

from __future__ import annotations

from typing import Final

PROVED_ON: Final = "1.85.1"

INT_MAX: Final = (1 << 31) - 1
"""Milliseconds that mean "never", in every option of gRPC."""

SHORTEST_MS: Final = 1_000
"""The shortest interval of pings. gRPC takes less for this."""

FLOOR_MS: Final = 300_000
"""The interval of pings that a server permits by default (gRFC A8)."""

IDLE_FLOOR_MS: Final = 7_200_000
"""The interval permitted while no call is open, if the server permits no pings without calls."""

STRIKES: Final = 2
"""The pings that may come too early; the next one ends the connection."""

RETIRED: Final = {
    "grpc.http2.min_recv_ping_interval_without_data_ms": (
        "grpc.http2.min_ping_interval_without_data_ms"
    ),
    "grpc.http2.min_sent_ping_interval_without_data_ms": "grpc.keepalive_time_ms",
    "grpc.http2.min_time_between_pings_ms": "grpc.keepalive_time_ms",
    "grpc.http2.keepalive_time_ms": "grpc.keepalive_time_ms",
    "grpc.keepalive_time": "grpc.keepalive_time_ms",
    "grpc.keepalive_timeout": "grpc.http2.ping_timeout_ms",
    "grpc.ping_timeout_ms": "grpc.http2.ping_timeout_ms",
}
"""Names that are often copied and that gRPC does not know, with the names to use instead."""

OF_SERVERS: Final = frozenset(
    {
        "grpc.http2.max_ping_strikes",
        "grpc.http2.min_ping_interval_without_data_ms",
        "grpc.max_concurrent_streams",
        "grpc.max_connection_age_grace_ms",
        "grpc.max_connection_age_ms",
        "grpc.max_connection_idle_ms",
        "grpc.server_handshake_timeout_ms",
        "grpc.so_reuseport",
    }
)
"""Options without an effect in a channel."""

OF_CHANNELS: Final = frozenset(
    {
        "SingleThreadedUnaryStream",
        "grpc.client_idle_timeout_ms",
        "grpc.default_authority",
        "grpc.dns_min_time_between_resolutions_ms",
        "grpc.enable_retries",
        "grpc.initial_reconnect_backoff_ms",
        "grpc.lb_policy_name",
        "grpc.max_reconnect_backoff_ms",
        "grpc.min_reconnect_backoff_ms",
        "grpc.service_config",
        "grpc.ssl_target_name_override",
        "grpc.use_local_subchannel_pool",
    }
)
"""Options without an effect in a server."""

_WITHOUT_PREFIX: Final = """
    absolute_max_metadata_size authorization_policy_provider census client_idle_timeout_ms
    compression_enabled_algorithms_bitset default_authority default_compression_algorithm
    default_compression_level disable_client_authority_filter dns_ares_query_timeout
    dns_enable_srv_queries dns_min_time_between_resolutions_ms dscp enable_channelz
    enable_http_proxy enable_retries expand_wildcard_addrs experimental.enable_hedging
    experimental.http2.enable_preferred_frame_size experimental.tcp_max_read_buffer_size
    experimental.tcp_max_read_chunk_size experimental.tcp_min_read_chunk_size
    experimental.tcp_read_chunk_size experimental.tcp_tx_zerocopy_enabled
    experimental.tcp_tx_zerocopy_max_simultaneous_sends
    experimental.tcp_tx_zerocopy_send_bytes_threshold grpclb_call_timeout_ms
    grpclb_fallback_timeout_ms happy_eyeballs_connection_attempt_delay_ms
    http.max_concurrent_streams_reject_on_client http.overload_protection http2.ack_pings
    http2.bdp_probe http2.hpack_table_size.decoder http2.hpack_table_size.encoder
    http2.initial_sequence_number http2.lookahead_bytes http2.max_frame_size
    http2.max_inflight_pings http2.max_ping_strikes http2.max_pings_without_data
    http2.max_requests_per_read http2.max_security_frame_size
    http2.min_ping_interval_without_data_ms http2.ping_on_rst_stream_percent
    http2.ping_timeout_ms http2.settings_timeout http2.true_binary http2.write_buffer_size
    http2_scheme http_connect_headers http_connect_server http_proxy inhibit_health_checking
    initial_reconnect_backoff_ms keepalive_permit_without_calls keepalive_time_ms
    keepalive_timeout_ms lb.ring_hash.ring_size_cap lb_policy_name max_allowed_incoming_connections
    max_channel_trace_event_memory_per_node max_concurrent_streams max_connection_age_grace_ms
    max_connection_age_ms max_connection_idle_ms max_metadata_size max_receive_message_length
    max_reconnect_backoff_ms max_send_message_length min_reconnect_backoff_ms minimal_stack
    per_message_compression per_message_decompression per_rpc_retry_buffer_size
    preferred_transport_protocols primary_user_agent priority_failover_timeout_ms resource_quota
    secondary_user_agent server.max_pending_requests server.max_pending_requests_hard_limit
    server_call_metric_recording server_handshake_timeout_ms
    server_max_unrequested_time_in_server service_config service_config_disable_resolution
    so_reuseport ssl_session_cache ssl_target_name_override tcp_receive_buffer_size
    tsi.max_frame_size use_local_subchannel_pool xds_resource_does_not_exist_timeout_ms"""

KNOWN: Final = frozenset(
    {"SingleThreadedUnaryStream"}.union(f"grpc.{name}" for name in _WITHOUT_PREFIX.split())
)
"""All options. The one without "grpc." is read by grpcio's Python code."""
