"""The connections of a session with ZooKeeper, to a server of the test."""

import contextlib
import socket
import ssl
import threading

import trustme
from kazoo.protocol.states import KazooState

from fixtures.waiting import WAIT_S
from rpcwheel._engines.tls import Tls
from rpcwheel.registry.backends.zookeeper_session import Handler


def test_each_connection_reads_the_files_of_certificates_again(tmp_path):
    handler = Handler(WAIT_S, Tls(ca=str(tmp_path / "root.pem")))
    for _ in range(2):  # the root is renewed between the connections
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / "root.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def serve(listening=listening, context=context):
                with contextlib.suppress(OSError):  # the client does not trust the certificate
                    sock, _ = listening.accept()
                    context.wrap_socket(sock, server_side=True).close()

            thread = threading.Thread(target=serve)
            thread.start()
            handler.create_connection(listening.getsockname()).close()
            thread.join(WAIT_S)
        handler.state_changed(KazooState.CONNECTED)
