// Iceberg Java's REST catalog on loopback: the RESTCatalogAdapter of Iceberg's own tests, behind the JDK's HTTP server.
// The package is the adapter's, whose parts are not public. The servlet of Iceberg's tests does the same in a container.
package org.apache.iceberg.rest

import java.io.File
import java.net.{InetAddress, InetSocketAddress, URI, URLDecoder}
import java.nio.charset.StandardCharsets.UTF_8
import java.util.concurrent.Executors
import java.util.function.Consumer

import scala.jdk.CollectionConverters._

import com.sun.net.httpserver.{HttpExchange, HttpServer}
import org.apache.iceberg.Files
import org.apache.iceberg.inmemory.InMemoryCatalog
import org.apache.iceberg.io.{FileIO, InputFile, OutputFile, PositionOutputStream, SeekableInputStream}
import org.apache.iceberg.rest.responses.ErrorResponse

object RestServer {
  /** Serve a catalog until standard input ends. The argument is the warehouse, a folder's URI. Prints the port. */
  def main(arguments: Array[String]): Unit = {
    val catalog = new InMemoryCatalog()
    catalog.initialize("rest", Map("warehouse" -> arguments(0)).asJava)
    // Only the pointers to tables are in memory: files are in the warehouse, for which the catalog has no setting.
    val files = classOf[InMemoryCatalog].getDeclaredField("io")
    files.setAccessible(true)
    files.set(catalog, new LocalFiles)
    val handler = new Handler(new RESTCatalogAdapter(catalog))
    val server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress, 0), 64)
    server.createContext("/", exchange => handler.handle(exchange))
    server.setExecutor(Executors.newFixedThreadPool(16))
    server.start()
    println(server.getAddress.getPort)
    while (System.in.read() >= 0) {}
    System.exit(0)
  }
}

/** Opens files by their URIs, and keeps these as their locations. */
class LocalFiles extends FileIO {
  private def file(location: String) = new File(URI.create(location))

  def newInputFile(uri: String): InputFile = {
    val inner = Files.localInput(file(uri))
    new InputFile {
      def getLength: Long = inner.getLength
      def newStream(): SeekableInputStream = inner.newStream()
      def location: String = uri
      def exists: Boolean = inner.exists
    }
  }

  def newOutputFile(uri: String): OutputFile = {
    val inner = Files.localOutput(file(uri))
    new OutputFile {
      def create(): PositionOutputStream = inner.create()
      def createOrOverwrite(): PositionOutputStream = inner.createOrOverwrite()
      def location: String = uri
      def toInputFile: InputFile = newInputFile(uri)
    }
  }

  def deleteFile(uri: String): Unit = java.nio.file.Files.deleteIfExists(file(uri).toPath): Unit
}

/** The adapter refuses a request. */
class Refused extends RuntimeException

/** Answers requests with what the adapter says. */
class Handler(adapter: RESTCatalogAdapter) {
  private val mapper = RESTObjectMapper.mapper()

  def handle(exchange: HttpExchange): Unit = {
    var status = 204
    var answer: Object = null
    try {
      val failed: Consumer[ErrorResponse] = error => {
        status = error.code
        answer = error
        throw new Refused
      }
      try {
        val made = run(exchange, failed)
        if (made != null) {
          status = 200
          answer = made
        }
      } catch {
        case _: Refused => // the answer is the error
      }
    } catch {
      case error: Exception =>
        status = 400
        answer = ErrorResponse.builder().responseCode(400).withType(error.getClass.getSimpleName)
          .withMessage(String.valueOf(error.getMessage)).build()
    }
    send(exchange, status, answer)
  }

  private def run(exchange: HttpExchange, failed: Consumer[ErrorResponse]): RESTResponse = {
    val method = HTTPRequest.HTTPMethod.valueOf(exchange.getRequestMethod)
    val path = exchange.getRequestURI.getRawPath.substring(1)
    val found = Route.from(method, path)
    if (found == null) {
      throw new IllegalArgumentException(s"no route for $method $path")
    }
    val route = found.first()
    val body: Object =
      if (route.requestClass() == null) null else mapper.readValue(exchange.getRequestBody, route.requestClass())
    val headers = exchange.getRequestHeaders.asScala.map { case (name, values) => name -> values.asScala.head }
    val request = adapter.buildRequest(method, path, parameters(exchange).asJava, headers.toMap.asJava, body)
    adapter.execute(
      request,
      route.responseClass().asInstanceOf[Class[RESTResponse]],
      failed,
      (more: java.util.Map[String, String]) => more.forEach((name, value) => exchange.getResponseHeaders.set(name, value))
    )
  }

  private def parameters(exchange: HttpExchange): Map[String, String] =
    Option(exchange.getRequestURI.getRawQuery).toSeq.flatMap(_.split("&")).map(_.span(_ != '=')).map {
      case (name, value) => URLDecoder.decode(name, UTF_8) -> URLDecoder.decode(value.drop(1), UTF_8)
    }.toMap

  private def send(exchange: HttpExchange, status: Int, answer: Object): Unit = {
    val data = if (answer == null) Array.emptyByteArray else mapper.writeValueAsBytes(answer)
    exchange.getResponseHeaders.set("Content-Type", "application/json")
    val bodiless = exchange.getRequestMethod == "HEAD" || data.isEmpty
    exchange.sendResponseHeaders(status, if (bodiless) -1 else data.length.toLong)
    if (!bodiless) {
      exchange.getResponseBody.write(data)
    }
    exchange.close()
  }
}
