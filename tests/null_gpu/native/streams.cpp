// Streams and events. Everything runs at once, so no wait ever waits: it is counted, and checked against captures.
#include "core.h"

#include <mutex>

static const uint32_t MAGIC = 0x4e475354;
static const int MAX_DEVICES = 64;

// Handles 0 and 1 are the legacy stream, which all blocking streams wait for; 2 is the thread's own default.
static bool is_legacy(void* handle) { return (uintptr_t)handle <= 1; }

static int refuse(Capture* capture, const char* who, int error) {
  capture->is_invalid = true;
  ng_illegal(who);
  return error;
}

extern "C" {
Stream* ng_stream(void* handle) {
  if ((uintptr_t)handle > 2) {
    Stream* stream = (Stream*)handle;
    return stream->magic == MAGIC ? stream : nullptr;
  }
  static std::mutex guard;
  static Stream* defaults[2][MAX_DEVICES];
  std::lock_guard<std::mutex> lock(guard);
  Stream*& stream = defaults[is_legacy(handle) ? 0 : 1][ng_device()];
  if (!stream) stream = new Stream{MAGIC, ng_device(), 0, 0, nullptr, {}};
  return stream;
}

void* ng_stream_create(unsigned flags, int priority) {
  return new Stream{MAGIC, ng_device(), flags, priority, nullptr, {}};
}

int ng_stream_destroy(void* handle) {
  Stream* stream = ng_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (!stream->capture) {
    stream->magic = 0;
    delete stream;
  }
  return 0;
}

int ng_stream_synchronize(void* handle) {
  Stream* stream = ng_stream(handle);
  if (!stream) return INVALID_HANDLE;
  COUNT("sync");
  COUNT("sync.stream");
  ng_event(SYNC, "cudaStreamSynchronize", 0);
  if (stream->capture)
    return refuse(stream->capture, "cudaStreamSynchronize of a capturing stream", CAPTURE_UNSUPPORTED);
  return is_legacy(handle) ? ng_unsafe("cudaStreamSynchronize of the legacy stream") : 0;
}

int ng_stream_query(void* handle) {
  Stream* stream = ng_stream(handle);
  if (!stream) return INVALID_HANDLE;
  if (stream->capture) return refuse(stream->capture, "cudaStreamQuery of a capturing stream", CAPTURE_UNSUPPORTED);
  return 0;
}

int ng_device_synchronize() {
  COUNT("sync");
  COUNT("sync.device");
  ng_event(SYNC, "cudaDeviceSynchronize", 0);
  return ng_unsafe("cudaDeviceSynchronize");
}

int ng_stream_wait(void* handle, Event* event) {
  Stream* stream = ng_stream(handle);
  if (!stream || !event) return INVALID_HANDLE;
  Capture* of_event = event->capture_id ? ng_find_capture(event->capture_id) : nullptr;
  if (stream->capture && event->is_recorded && !of_event)
    return refuse(stream->capture, "cudaStreamWaitEvent on an event from outside the capture", CAPTURE_ISOLATION);
  if (!of_event) return 0;
  if (stream->capture && stream->capture != of_event) {
    of_event->is_invalid = true;
    return refuse(stream->capture, "cudaStreamWaitEvent between two captures", CAPTURE_MERGE);
  }
  if (!stream->capture) {
    if (is_legacy(handle)) return refuse(of_event, "the legacy stream waits for a capture", CAPTURE_IMPLICIT);
    stream->capture = of_event;
    stream->tails.clear();
    of_event->streams.push_back(stream);
  }
  for (Node* tail : event->tails) {
    bool is_known = false;
    for (Node* known : stream->tails) is_known |= known == tail;
    if (!is_known) stream->tails.push_back(tail);
  }
  return 0;
}

Event* ng_event_create(unsigned flags) {
  return new Event{flags, 0, {}, 0, false};
}

int ng_event_record(Event* event, void* handle) {
  Stream* stream = ng_stream(handle);
  if (!stream || !event) return INVALID_HANDLE;
  if (stream->capture && stream->capture->is_invalid) return CAPTURE_INVALIDATED;
  event->is_recorded = true;
  event->seconds = ng_now();
  event->capture_id = stream->capture ? stream->capture->id : 0;
  event->tails = stream->capture ? stream->tails : std::vector<Node*>();
  return 0;
}

int ng_event_query(Event* event) {
  if (!event) return INVALID_HANDLE;
  if (Capture* capture = ng_find_capture(event->capture_id))
    return refuse(capture, "cudaEventQuery of a captured event", CAPTURED_EVENT);
  return ng_unsafe("cudaEventQuery");
}

int ng_event_synchronize(Event* event) {
  if (!event) return INVALID_HANDLE;
  COUNT("sync");
  COUNT("sync.event");
  ng_event(SYNC, "cudaEventSynchronize", 0);
  if (Capture* capture = ng_find_capture(event->capture_id))
    return refuse(capture, "cudaEventSynchronize of a captured event", CAPTURED_EVENT);
  return ng_unsafe("cudaEventSynchronize");
}

float ng_elapsed_ms(Event* begin, Event* end) {
  double ms = (end->seconds - begin->seconds) * 1e3;
  return ms < 0.001 ? 0.001f : (float)ms;
}
}
