// A device in a page: MQTT 3.1.1 by hand over the WebSocket that browsers have, and nothing else.
// node browser_device.mjs URL NAME TOKEN
// It says that it is online, carries one command out, answers it, and prints what it was told.

const [url, name, token] = process.argv.slice(2)
const encoder = new TextEncoder()
const decoder = new TextDecoder()

const sized = (value) => {
  const bytes = encoder.encode(value)
  return [bytes.length >> 8, bytes.length & 255, ...bytes]
}
const packet = (first, body) => {
  const head = [first]
  let size = body.length
  do {
    head.push((size & 127) | (size > 127 ? 128 : 0))
    size >>= 7
  } while (size)
  return new Uint8Array([...head, ...body])
}
const publish = (topic, value, number, retain = 0) =>
  packet(0x32 | retain, [...sized(topic), 0, number, ...encoder.encode(JSON.stringify(value))])

const socket = new WebSocket(url, ['mqtt'])
socket.binaryType = 'arraybuffer'
socket.onopen = () => {
  const login = [...sized('MQTT'), 4, 0xc2, 0, 30, ...sized(name), ...sized(name), ...sized(token)]
  socket.send(packet(0x10, login))
}
socket.onerror = () => console.log(JSON.stringify({ error: 'no WebSocket' }))
socket.onclose = () => process.exit(0)

const handle = (kind, body) => {
  if (kind === 0x20) {
    console.log(JSON.stringify({ connack: body[1] }))
    if (body[1] === 0) socket.send(packet(0x82, [0, 1, ...sized(`nodes/${name}/pending`), 1]))
  } else if (kind === 0x90) {
    socket.send(publish(`nodes/${name}/status`, { time: 0, online: true }, 2, 1))
  } else if (kind === 0x30) {
    const at = 2 + (body[0] << 8) + body[1]
    const task = JSON.parse(decoder.decode(body.subarray(at + 2)))
    console.log(JSON.stringify({ action: task.action, payload: JSON.parse(atob(task.payload)) }))
    socket.send(packet(0x40, body.subarray(at, at + 2)))
    socket.send(publish('nodes/hub/complete', { msg_id: task.msg_id, value: btoa('"opened"') }, 3))
  } else if (kind === 0x40 && body[1] === 3) {
    socket.close()
  }
}

let rest = new Uint8Array()
socket.onmessage = ({ data }) => {
  rest = new Uint8Array([...rest, ...new Uint8Array(data)])
  for (;;) {
    let size = 0
    let at = 1
    do {
      if (at >= rest.length) return
      size |= (rest[at] & 127) << (7 * (at - 1))
    } while (rest[at++] & 128)
    if (at + size > rest.length) return
    handle(rest[0] & 0xf0, rest.subarray(at, at + size))
    rest = rest.subarray(at + size)
  }
}
