// Trains an artifact by ONNX Runtime's C API, with what the file begin.state holds of its state:
//
//   c++ -std=c++17 train.cc -lonnxruntime -o train
//   ./train artifact/train.onnx begin.state 20 end.safetensors
//
// Python writes the first file, Trainer.save, and reads the second, Trainer.set_state. The batches
// here are of a classifier's, x: float32[batch, 24] and y: int64[batch]; an app has its own.

#include <onnxruntime_c_api.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <regex>
#include <string>
#include <vector>

static const OrtApi* ort = nullptr;

static void check(OrtStatus* status) {
  if (status == nullptr) return;
  std::cerr << ort->GetErrorMessage(status) << "\n";
  std::exit(1);
}

struct Tensor {
  std::string dtype;  // as safetensors calls it
  std::vector<int64_t> dims;
  std::vector<char> bytes;
};
using Tensors = std::map<std::string, Tensor>;

template <typename T>
static Tensor tensor(const char* dtype, std::vector<int64_t> dims, const std::vector<T>& values) {
  const char* begin = reinterpret_cast<const char*>(values.data());
  return {dtype, dims, {begin, begin + values.size() * sizeof(T)}};
}

// -- files ----------------------------------------------------------------------------------------

// A safetensors file: the header's length, the header, the data. Headers are JSON, for which an app
// takes a library; those that Python writes have this form.
static Tensors read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  uint64_t length = 0;
  std::memcpy(&length, text.data(), sizeof length);
  const std::string header = text.substr(8, length);
  const std::regex entry(
      R"re("([^"]+)":\{"dtype":"(\w+)","shape":\[([\d,]*)\],"data_offsets":\[(\d+),(\d+)\]\})re");
  Tensors found;
  for (std::sregex_iterator at(header.begin(), header.end(), entry), end; at != end; ++at) {
    const std::smatch& match = *at;
    const char* data = text.data() + 8 + length;
    Tensor& each = found[match[1]];
    each = {match[2], {}, {data + std::stoull(match[4]), data + std::stoull(match[5])}};
    const std::string dims = match[3];
    const std::regex number(R"(\d+)");
    for (std::sregex_iterator dim(dims.begin(), dims.end(), number); dim != end; ++dim) {
      each.dims.push_back(std::stoll(dim->str()));
    }
  }
  return found;
}

static void write(const char* path, const Tensors& tensors) {
  std::string header, data;
  for (const auto& [name, each] : tensors) {
    std::string dims;
    for (int64_t dim : each.dims) dims += (dims.empty() ? "" : ",") + std::to_string(dim);
    header += (header.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"" + each.dtype;
    header += "\",\"shape\":[" + dims + "],\"data_offsets\":[" + std::to_string(data.size()) + ",";
    data.append(each.bytes.data(), each.bytes.size());
    header += std::to_string(data.size()) + "]}";
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length) << header << data;
}

// -- a step ---------------------------------------------------------------------------------------

// What a step's random numbers derive from: SplitMix64 of a run's seed and the step, 31 bits.
static int64_t step_seed(uint64_t seed, uint64_t step) {
  uint64_t value = seed * 0x9e3779b97f4a7c15 + (step + 1) * 0xd1b54a32d192ed03;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return static_cast<int64_t>((value ^ (value >> 31)) >> 33);
}

static ONNXTensorElementDataType element_type(const std::string& dtype) {
  if (dtype == "F32") return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  if (dtype == "I64") return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  std::cerr << "a tensor of dtype " << dtype << ": add it here\n";
  std::exit(1);
}

struct Graph {
  OrtSession* session = nullptr;
  OrtMemoryInfo* memory = nullptr;
  std::vector<const char*> inputs, outputs;

  Graph(OrtEnv* env, const char* path) {
    OrtSessionOptions* options = nullptr;
    check(ort->CreateSessionOptions(&options));
    check(ort->SetIntraOpNumThreads(options, 1));  // an embedding's gradient races under several
    check(ort->CreateSession(env, path, options, &session));
    check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
    OrtAllocator* allocator = nullptr;
    check(ort->GetAllocatorWithDefaultOptions(&allocator));
    size_t count = 0;
    char* name = nullptr;
    check(ort->SessionGetInputCount(session, &count));
    for (size_t i = 0; i < count; ++i) {
      check(ort->SessionGetInputName(session, i, allocator, &name));
      inputs.push_back(name);
    }
    check(ort->SessionGetOutputCount(session, &count));
    for (size_t i = 0; i < count; ++i) {
      check(ort->SessionGetOutputName(session, i, allocator, &name));
      outputs.push_back(name);
    }
  }

  // What is fed, by the graph's names, is read where it lies. The outputs are to be released.
  std::map<std::string, OrtValue*> run(Tensors& feeds) {
    std::vector<OrtValue*> values;
    for (const char* name : inputs) {
      Tensor& each = feeds.at(name);
      OrtValue* value = nullptr;
      check(ort->CreateTensorWithDataAsOrtValue(memory, each.bytes.data(), each.bytes.size(),
                                                each.dims.data(), each.dims.size(),
                                                element_type(each.dtype), &value));
      values.push_back(value);
    }
    std::vector<OrtValue*> results(outputs.size());
    check(ort->Run(session, nullptr, inputs.data(), values.data(), inputs.size(), outputs.data(),
                   outputs.size(), results.data()));
    for (OrtValue* value : values) ort->ReleaseValue(value);
    std::map<std::string, OrtValue*> found;
    for (size_t i = 0; i < outputs.size(); ++i) found[outputs[i]] = results[i];
    return found;
  }
};

template <typename T>
static T* data(OrtValue* value) {
  void* found = nullptr;
  check(ort->GetTensorMutableData(value, &found));
  return static_cast<T*>(found);
}

// An app's own rows go here.
static void add_batch(Tensors& feeds, int step) {
  constexpr int kRows = 16, kColumns = 24;
  std::vector<float> x(kRows * kColumns);
  std::vector<int64_t> y(kRows);
  for (size_t i = 0; i < x.size(); ++i) x[i] = ((i * 37 + step * 11) % 64) / 32.0f - 1;
  for (size_t i = 0; i < y.size(); ++i) y[i] = (i + step) % 4;
  feeds["batch.x"] = tensor("F32", {kRows, kColumns}, x);
  feeds["batch.y"] = tensor("I64", {kRows}, y);
}

int main(int count, char** arguments) {
  if (count != 5) {
    std::cerr << "train GRAPH STATE STEPS NEW_STATE\n";
    return 2;
  }
  // Before the library's first call: it would write an id to the user's cache.
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);
  ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  Tensors state = read(arguments[2]);
  OrtEnv* env = nullptr;
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "train", &env));
  Graph graph(env, arguments[1]);
  for (int step = 0; step < std::atoi(arguments[3]); ++step) {
    Tensors feeds;
    for (const auto& [name, each] : state) feeds["state." + name] = each;
    add_batch(feeds, step);
    feeds["hyper.lr"] = tensor("F32", {}, std::vector<float>{1e-3f});
    feeds["seed"] = tensor("I64", {}, std::vector<int64_t>{step_seed(0, step)});
    auto found = graph.run(feeds);
    const float loss = *data<float>(found["loss"]);
    // Else the step is dropped: the state stays what it was.
    if (std::isfinite(loss) && std::isfinite(*data<float>(found["guard"]))) {
      for (auto& [name, each] : state) {
        const auto next = found.find("new." + name);
        if (next == found.end()) continue;  // a step leaves it as it is
        std::memcpy(each.bytes.data(), data<char>(next->second), each.bytes.size());
      }
    }
    for (const auto& [name, value] : found) ort->ReleaseValue(value);
    std::cout << "step " << step + 1 << "  loss " << loss << "\n";
  }
  write(arguments[4], state);
  return 0;
}
