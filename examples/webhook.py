"""A receiver of alerts: checks the signature (Standard Webhooks), and keeps ids so that a repeat is no news.

Run it: WEBHOOK_SECRET=whsec_… python examples/webhook.py 8080
then: duly profile set home --send http://127.0.0.1:8080/ --secret whsec_…
(the hub needs --allow-private-webhooks for an address on its own machine)
"""

import base64
import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

SECRET = base64.b64decode(os.environ["WEBHOOK_SECRET"].removeprefix("whsec_"))
seen: set[str] = set()  # a real receiver keeps them in its database


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        id_, sent = self.headers["webhook-id"], self.headers["webhook-timestamp"]
        signature = hmac.new(SECRET, f"{id_}.{sent}.".encode() + body, hashlib.sha256).digest()
        expected = "v1," + base64.b64encode(signature).decode()
        genuine = any(hmac.compare_digest(expected, one) for one in self.headers["webhook-signature"].split())
        if not genuine or abs(time.time() - int(sent)) > 300:
            self.send_error(401)
            return
        if id_ not in seen:
            seen.add(id_)
            notice = json.loads(body)
            print(notice["type"], notice["data"]["reason"], flush=True)
        self.send_response(204)
        self.end_headers()


server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver)
print(f"listening on {server.server_port}", flush=True)
server.serve_forever()
