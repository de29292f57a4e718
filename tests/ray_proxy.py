"""`python ray_proxy.py PORT_FILE HOW`: a bad connection to the Ray dashboard of this machine. Standard library only.

lose-submit: the first answer to a job's submission never arrives. cut SECONDS: every connection ends after so
long. mute: takes connections and never says a word. dribble: a byte a second.
"""

import socket
import sys
import threading
import time

DASHBOARD = ("127.0.0.1", 8265)
LOST = []


def carry(client, how):
    server = socket.create_connection(DASHBOARD)
    sent = bytearray()
    threading.Thread(target=forward, args=(client, server, sent), daemon=True).start()
    if how[0] == "cut":
        threading.Timer(float(how[1]), end, (client, server)).start()
    while True:
        try:
            data = server.recv(4096)
        except OSError:
            break
        if not data:
            break
        if how[0] == "lose-submit" and not LOST and sent.startswith(b"POST /api/jobs/ "):
            LOST.append(1)
            break
        try:
            client.sendall(data)
        except OSError:
            break
    end(client, server)


def end(*sockets):
    for one in sockets:
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        one.close()


def forward(client, server, sent):
    try:
        while data := client.recv(65536):
            sent += data[:64]
            server.sendall(data)
    except OSError:
        pass


def mute(client, how):
    while True:
        time.sleep(1)
        if how[0] == "dribble":
            client.sendall(b"H")


def main(port_file, *how):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(50)
    with open(port_file, "w") as file:
        file.write(str(listener.getsockname()[1]))
    while True:
        client, _ = listener.accept()
        target = mute if how[0] in ("mute", "dribble") else carry
        threading.Thread(target=target, args=(client, how), daemon=True).start()


main(*sys.argv[1:])
